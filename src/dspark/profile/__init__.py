"""What a round costs on this machine: measured, fitted, kept, and handed to the policies as prices.

profile = measure_profile(target, drafter, gamma=7)     # a few seconds
cost = profile.cost()                                   # a CostModel of dspark.schedule.cost
profile = ensure_profile(target, drafter, gamma=7)      # from the cache where one fits this machine and model
"""

from dspark.profile.fit import Sample, fit_cost, isotonic, pooled_noise
from dspark.profile.measure import ProfileSettings, measure_profile
from dspark.profile.store import Profile, ensure_profile, fingerprint
from dspark.profile.tables import CostTable, load_cost_table, read_cost_table, write_cost_table

__all__ = [
    "CostTable",
    "Profile",
    "ProfileSettings",
    "Sample",
    "ensure_profile",
    "fingerprint",
    "fit_cost",
    "isotonic",
    "load_cost_table",
    "measure_profile",
    "pooled_noise",
    "read_cost_table",
    "write_cost_table",
]

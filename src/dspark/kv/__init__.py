"""Paged KV storage: the pool, block tables and their rollback."""

from dspark.kv.pool import BlockTable, KVPool, LayerKV

__all__ = ["BlockTable", "KVPool", "LayerKV"]

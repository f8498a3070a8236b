"""`dspark serve`: OpenAI's completions and chat completions over HTTP."""

from __future__ import annotations

import argparse
import os
import socket
from typing import TYPE_CHECKING, Any

from dspark.cli.messages import say
from dspark.cli.options import (
    add_model_options,
    add_schedule_options,
    check_schedule_options,
    load_llm,
    schedule_config,
    speculative_config,
)

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

__all__ = ["add_parser", "listen", "server_of"]

KEY = "DSPARK_API_KEY"


def add_parser(verbs: Any) -> None:
    """Add the verb to the `add_subparsers` object of `dspark`."""
    parser = verbs.add_parser("serve", help="serve over HTTP", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (%(default)s)")
    parser.add_argument("--served-model-name", metavar="NAME", help="default: what --model says")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"asked of clients; default: ${KEY}, if set (visible to no other user)",
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=16, metavar="N", help="in one batch (%(default)s)"
    )
    parser.add_argument(
        "--max-waiting", type=int, default=256, metavar="N", help="more are told to try later (%(default)s)"
    )
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens a request may have in all")
    parser.add_argument("--kv-cache-tokens", type=int, metavar="N", help="tokens that all requests may have")
    add_model_options(parser, method="dspark+lookup")
    add_schedule_options(parser, policy="auto")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Listen, load the model, serve until interrupted."""
    from dspark.core import DSparkError

    try:
        from dspark.server.app import make_app
        from dspark.server.metrics import ServerMetrics
    except ModuleNotFoundError as error:
        raise DSparkError(f"{error.name} is missing: pip install 'dspark[serve]'") from error
    from dspark.async_llm import AsyncLLM

    config = speculative_config(args.method, args.drafter, args.num_speculative_tokens)
    check_schedule_options(args, policy="auto")
    config |= schedule_config(args, args.method)
    if args.max_waiting < 0:
        raise DSparkError(f"--max-waiting must be 0 or more, got {args.max_waiting}")
    with listen(args.host, args.port) as listener:  # before the model is loaded: a taken port is told at once
        llm = load_llm(
            args,
            config,
            max_num_seqs=args.max_num_seqs,
            max_model_len=args.max_model_len,
            kv_cache_tokens=args.kv_cache_tokens,
        )
        metrics = ServerMetrics()
        name = args.served_model_name or args.model
        key = args.api_key or os.environ.get(KEY)
        app = make_app(AsyncLLM(llm, args.max_waiting, metrics.count), metrics, name, key)
        host, port = listener.getsockname()[:2]
        say(f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1 (Ctrl-C ends it)")
        server_of(app).run(sockets=[listener])
    return 0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        DSparkError: no such address, or it is taken.
    """
    from dspark.core import DSparkError

    try:
        if not 0 <= port <= 65535:
            raise OverflowError("ports are numbers from 0 to 65535")
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, OverflowError) as error:
        raise DSparkError(
            f"cannot listen at {host}:{port} ({error}): choose another --host or --port"
        ) from error


def server_of(app: Starlette) -> uvicorn.Server:
    """Its `run` ends at SIGINT or SIGTERM; what runs then has 3 seconds left."""
    import uvicorn

    return uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=3))

"""`likethat serve`: a web page to ask, browse and correct a run."""

from __future__ import annotations

import argparse
import os
from typing import Any

from likethat.cli.arguments import DONE, OWN_DATA, add_verb
from likethat.errors import UserError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
LEAST_TOKEN = 16  # letters


def serve(args: argparse.Namespace) -> int:
    """Serve a run as a web page and an API; other machines need a token."""
    try:
        from likethat.serve.app import create_app, open_socket, run_app
        from likethat.serve.security import new_token
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("likethat"):
            raise
        raise UserError(
            f"The web page needs {error.name}, which is not installed; run `pip install 'likethat[serve]'`."
        ) from error
    from likethat.runs.classifier import load

    token = os.environ.get("LIKETHAT_TOKEN") or None
    if token is not None and len(token) < LEAST_TOKEN:
        raise UserError(f"LIKETHAT_TOKEN has {len(token)} letters; choose at least {LEAST_TOKEN}, or leave it unset.")
    generated = None
    if token is None and args.host not in LOOPBACK:
        token = generated = new_token()
    opened = open_socket("127.0.0.1" if args.host == "localhost" else args.host, args.port)
    with opened:
        app = create_app(load(args.run, args.device), data=args.data, token=token)
        host = f"[{args.host}]" if ":" in args.host else args.host
        address = f"http://{host}:{opened.getsockname()[1]}/"

        def ready() -> None:
            print(f"Serving {args.run} at {address}{f'?token={generated}' if generated else ''}", flush=True)
            print("It stops with Ctrl-C.", flush=True)

        run_app(app, opened, ready)
    return DONE


def add(verbs: Any) -> None:
    verb = add_verb(verbs, "serve", serve, run=True, data=OWN_DATA)
    verb.add_argument("--host", default="127.0.0.1", help="address to serve on (default: 127.0.0.1, this machine only)")
    verb.add_argument("--port", type=int, default=8000, help="port to serve on; 0 takes a free one (default: 8000)")

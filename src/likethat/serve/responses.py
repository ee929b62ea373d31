"""JSON as every route answers with it."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse


class AsciiJSONResponse(JSONResponse):
    """Escapes all but ASCII: names of files and classes need not be valid Unicode, and then have no bytes in UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")

"""The C++ handler (handler.cc)."""

from typing import Any

def pointwise() -> Any: ...

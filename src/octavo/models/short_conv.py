"""The short convolutions of recurrent layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

_MOST_TAPS = 8  # csrc/short_conv.h


def read_num_taps(config: ConfigFile, key: str, default: int) -> int:
    """Read the width of a convolution."""
    num_taps = config.count(key, default)
    if not 2 <= num_taps <= _MOST_TAPS:
        raise config.error(key, f"must be 2 to {_MOST_TAPS}, not {num_taps}")
    return num_taps

"""What this namespace can do (`__array_namespace_info__`)."""

from __future__ import annotations

from typing import Any

from whit.array_api.dtypes import KINDS, STANDARD, isdtype
from whit.helpers import ArgumentError
from whit.tensor.storage import default_device, device_name
from whit.uop import DType, dtypes


class Info:
    """Capabilities, devices and dtypes."""

    def capabilities(self) -> dict[str, Any]:
        """What depends on values works, since it is computed when it is asked for."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        """Where tensors go that name no device."""
        return default_device()

    def default_dtypes(self, *, device: Any = None) -> dict[str, DType]:
        """What Python's numbers become, by kind."""
        self._known(device)
        return {
            "real floating": dtypes.default_float,
            "integral": dtypes.default_int,
            "indexing": dtypes.default_int,
        }

    def devices(self) -> list[str]:
        """The devices that are always there."""
        return list(dict.fromkeys([default_device(), "CPU", "PYTHON"]))

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, DType]:
        """The standard's dtypes that whit has, by name, of one kind or of several."""
        self._known(device)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        for k in kinds:
            if k is not None and k not in KINDS:
                raise ArgumentError(
                    f"dtypes(kind={k!r})",
                    because="there is no such kind",
                    fix="use one of " + ", ".join(KINDS),
                )
        return {d.name: d for d in STANDARD if kind is None or isdtype(d, kinds)}

    def _known(self, device: Any) -> None:
        if device is not None:
            device_name(device)


def __array_namespace_info__() -> Info:
    """What this namespace can do."""
    return Info()

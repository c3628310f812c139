"""Layers of layers: Sequential and ModuleList. Names of parameters are PyTorch's: "0.weight" and so on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, overload

from whit.helpers import ArgumentError, IndexingError
from whit.tensor.guard import guard, show_argument

Layer = Callable[..., Any]


class ModuleList:
    """A list of layers, or of anything that has parameters, which `nn.state` names by their positions.

    It is used as a list: indices, slices, `len`, iteration, `append`, `extend`, `insert`. Errors:
    IndexingError for a position that is not there.

    >>> from whit.nn import Linear
    >>> from whit.nn.state import get_state_dict
    >>> list(get_state_dict(ModuleList([Linear(2, 3, bias=False), Linear(3, 1, bias=False)])))
    ['0.weight', '1.weight']
    """

    def __init__(self, modules: Iterable[Any] = ()) -> None:
        self._set(list(modules))

    def _set(self, items: list[Any]) -> None:
        """Layers are attributes whose names are their positions: so they are named in state dicts."""
        self.__dict__.clear()
        self.__dict__.update({str(at): item for at, item in enumerate(items)})

    def _items(self) -> list[Any]:
        return list(self.__dict__.values())

    def _position(self, index: int) -> int:
        """A position from 0, given one that may count from the end."""
        size = len(self)
        if not isinstance(index, int) or not -size <= index < size:
            raise IndexingError(
                f"{type(self).__name__}[{show_argument(index)}]",
                because=f"it has {size} layers",
                fix=f"use a whole number from {-size} to {size - 1}" if size else "append a layer first",
            )
        return index % size

    def __len__(self) -> int:
        return len(self.__dict__)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items())

    def __contains__(self, item: object) -> bool:
        return any(own is item for own in self._items())

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> ModuleList: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            made = object.__new__(type(self))
            parts = list(self.__dict__.items())[index]
            named = list(self.__dict__) != [str(at) for at in range(len(self))]
            made.__dict__.update(parts if named else {str(at): item for at, (_, item) in enumerate(parts)})
            return made
        return self._items()[self._position(index)]

    def __setitem__(self, index: int, item: Any) -> None:
        items = self._items()
        items[self._position(index)] = item
        self._set(items)

    def __delitem__(self, index: int | slice) -> None:
        items = self._items()
        del items[index if isinstance(index, slice) else self._position(index)]
        self._set(items)

    def append(self, item: Any) -> ModuleList:
        """Put a layer at the end; the list itself."""
        self._set([*self._items(), item])
        return self

    def extend(self, items: Iterable[Any]) -> ModuleList:
        """Put layers at the end; the list itself."""
        self._set([*self._items(), *items])
        return self

    def insert(self, index: int, item: Any) -> None:
        """Put a layer before position `index`."""
        items = self._items()
        items.insert(index, item)
        self._set(items)

    def __repr__(self) -> str:
        names = [type(item).__name__ for item in self._items()]
        return f"{type(self).__name__}({', '.join(names)})"


class Sequential(ModuleList):
    """Layers, or functions, one after another: what one returns is the next one's argument.

    Made of layers, or of one dict of layers, whose keys then name them in place of positions. Errors:
    ArgumentError for what cannot be called.

    >>> from whit import Tensor
    >>> from whit.nn import Linear
    >>> model = Sequential(Linear(2, 8), Tensor.relu, Linear(8, 1))
    >>> model(Tensor.ones(5, 2)).shape, len(model), model[0].weight.shape
    ((5, 1), 3, (8, 2))
    """

    def __init__(self, *layers: Layer | Mapping[str, Layer]) -> None:
        named: Mapping[str, Any] = {str(at): layer for at, layer in enumerate(layers)}
        if len(layers) == 1 and isinstance(layers[0], Mapping):
            named = layers[0]
        for name, layer in named.items():
            if not callable(layer) or not isinstance(name, str):
                raise ArgumentError(
                    f"Sequential with {name!r}: {show_argument(layer)}",
                    because="it is made of layers, which can be called, and of names, which are texts",
                    fix="pass layers and functions, or one dict of them",
                )
        self.__dict__.update(named)

    def __call__(self, x: Any) -> Any:
        for layer in self._items():
            x = layer(x)
        return x

    def _set(self, items: list[Any]) -> None:
        names = list(self.__dict__)
        if names != [str(at) for at in range(len(names))]:
            raise ArgumentError(
                f"change a Sequential with the names {', '.join(names)}",
                because="positions would be no names of its layers",
                fix="build another one from a dict",
            )
        super()._set(items)


for _class in (ModuleList, Sequential):
    guard(_class, ["__init__"])

"""Where a function holds the tensors that its graphs read, and what it decided by: one walk from it, when it is captured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from segue import _torch
from segue.capture.code_names import Names, attributes_of, function_of, own_classes, stores_of
from segue.capture.compiled import Compiled
from segue.capture.decisions import Decisions
from segue.capture.object_graph import Place, Visit, is_users, visits, walk
from segue.capture.thread_state import state


class Places:
    """The first place found of each storage that ``root`` reaches, and what its code decides by. A root of None reaches nothing.

    The walk takes milliseconds, so it may be done once for several captures. A place counts only while the storage is still held
    there. If one is missing, :meth:`look_again` searches once more.

    ``outside``: modules that run outside the graphs. By default what the root's attribute ``outside`` has, where there is one.
    ``ctx``: the live context, by default that of the innermost ``active_forward``. ``also``: names that code says.

    ``names``: what the code outside breaks says. ``live_names``: those in the code of breaks, and of the methods that it names.
    ``stored_names``: of attributes that other code sets.

    ``once``: what one forward leaves behind in the user's objects all do, so that one capture looks. It sets ``leaves_nothing``.

    ``compiled``: whether the root reaches compiled code. ``writes_unseen``: whether some of it may write tensors that it was
    given, which no mode sees: any but that of :func:`~segue.compile_dynamic`.
    """

    def __init__(
        self,
        root: Any,
        name: str = "",
        outside: Iterable[torch.nn.Module] | None = None,
        ctx: Any = None,
        also: Iterable[str] = (),
        *,
        once: bool = False,
    ) -> None:
        self.root, self.name = root, name
        self.once, self.leaves_nothing = once, False
        names = Names()
        names.all.update(also)
        found = self._search(names)
        outside = getattr(root, "outside", ()) if outside is None else outside
        self.decisions = Decisions(found, names, outside, state.ctx if ctx is None else ctx)

    def look_again(self) -> None:
        """Walk from the root once more, and replace the places that were found before."""
        self._search(Names())

    def _search(self, names: Names) -> list[Visit]:
        self._found: dict[int, Place] = {}
        self.compiled = self.writes_unseen = False
        self.live_names: set[str] = set()
        self.stored_names: set[str] = set()
        found = [] if self.root is None else list(visits(self.root, self.name, names=names))
        self.names = names.all
        for visit in found:
            self._note_compiled(visit.obj)
            if visit.live and isinstance(visit.obj, FunctionType):
                self.live_names |= attributes_of(visit.obj.__code__)
            elif isinstance(visit.obj, FunctionType):
                self.stored_names |= stores_of(visit.obj.__code__)
            for place, value in visit.held:
                if isinstance(value, Tensor) and _torch.address(value):
                    self._found.setdefault(_torch.storage_key(value), place)
        called = [f for v in found for cls in own_classes(type(v.obj)) for n, f in vars(cls).items() if n in self.live_names]
        for fn in filter(None, map(function_of, called)):
            self.live_names |= attributes_of(fn.__code__)
        return found

    def _note_compiled(self, value: Any) -> None:
        if _is_compiled(value):
            self.compiled = True
            self.writes_unseen = self.writes_unseen or not isinstance(value, Compiled)

    def of(self, t: Tensor) -> Place | None:
        """The place where ``t``'s memory is held now; None if there is none."""
        key = _torch.storage_key(t)
        place = self._found.get(key)
        held = None if place is None else place.get()
        return place if isinstance(held, Tensor) and _torch.storage_key(held) == key else None

    def holds(self, obj: Any) -> bool:
        """Whether the root reaches ``obj`` by a name now. This takes another walk."""
        return self.root is not None and any(value is obj for _, value in walk(self.root))

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that are held at the places now."""
        for place in self._found.values():
            if isinstance(t := place.get(), Tensor):
                yield t


def tensors_held(owner: Any, name: str) -> dict[int, Place]:
    """The places of the tensors that ``owner`` holds, by storage, without a look at code. ``name``: of the owner."""
    found: dict[int, Place] = {}
    for place, value in walk(owner, name, is_users):
        if isinstance(value, Tensor) and _torch.address(value):
            found.setdefault(_torch.storage_key(value), place)
    return found


def _is_compiled(value: Any) -> bool:
    if isinstance(value, torch.nn.Module):
        return getattr(value, "_compiled_call_impl", None) is not None or "_torchdynamo_orig_callable" in value.__dict__
    held: dict[str, Any] = value.__dict__ if isinstance(value, FunctionType | Compiled) else {}
    return "_torchdynamo_orig_callable" in held and not held.get("_torchdynamo_disable", False)

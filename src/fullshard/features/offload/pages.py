"""Keep the tensors that autograd saves in host memory between forward and backward.

A page contains all tensors saved from the beginning of one unit to the beginning of the next one. Forward writes pages
and backward reads them in reverse order, so each page is on the device only twice:

    the next unit begins   the page is complete and is copied to the host while that unit computes
    the unit after begins  the device waits for the copy and frees the memory
    backward needs it      it was copied back while backward used the page after it; now the copy of the page before
                           it starts

The device therefore holds two pages, plus the last one: the page of the last unit and all that follows (head, loss)
stays on the device, because backward starts with it. If activations inside a unit are checkpointed, a page consists of
that unit's input.

A storage is moved only once, even if several views of it are saved, and only if there is no other holder. Otherwise,
moving it would not free memory, so it is passed on to the next page. For this reason attention masks and rotary tables,
which every layer saves, stay on the device, and no code can change a storage while it is copied.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from fullshard.core.errors import LifecycleError
from fullshard.core.events import EventKind
from fullshard.core.schedule import BackwardPrefetch
from fullshard.engine.call import Call
from fullshard.engine.extension import Extension
from fullshard.engine.schedule import Schedule
from fullshard.engine.unit import Unit
from fullshard.features.offload import torch_private
from fullshard.features.offload.host import Copied, Host, StorageView, bytes_of
from fullshard.features.offload.storage import HostStorage, check_offloads_activations

SMALLEST_NBYTES = 2**16
"""Smaller storages stay on the device, because any copy takes several microseconds, in which PCIe transfers this much.
They are mostly statistics of norms and attention: four bytes per token, compared with thousands for other tensors."""


class Pages:
    """The pages of one model and their current locations."""

    def __init__(self, units: Sequence[Unit], host: Host) -> None:
        self._host, self._device = host, units[-1].mesh.device
        self._weights = frozenset(key for unit in units for bucket in unit.buckets for key in bucket.storage_ids)
        self._nothing = torch.empty(0, device=self._device)
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._is_watching = self._ahead = False
        self._pages: list[Page] = []
        self._numbers = itertools.count()
        self.page: Page | None = None
        self._wanted: Page | None = None
        self._leaving: tuple[list[_Block], Copied] | None = None
        self._blocks: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, units: Sequence[Unit]) -> Pages | None:
        """Return the pages of a list of units, or None if no unit has its activations on the host."""
        storages = (unit.storage for unit in units if isinstance(unit.storage, HostStorage))
        return next((cls(units, storage.host) for storage in storages if storage.offload.activations), None)

    # -- forward ------------------------------------------------------------------------------------------------

    def begin(self, *, ahead: bool) -> None:
        """Start a forward of the model; `ahead` allows backward to keep two pages on the device.

        Do nothing without autograd, or inside other code's hooks for saved tensors: a script that checkpoints the
        complete model has already decided what to keep.
        """
        self.end()  # in case a forward was interrupted
        self._ahead, self._wanted = ahead, None
        self._pages = [page for page in self._pages if any(page.blocks)]
        if torch.is_grad_enabled() and not torch_private.are_saved_elsewhere():
            self._hooks.__enter__()
            self._is_watching = True

    def turn(self, unit: Unit) -> None:
        """Start the page of a unit, which receives all tensors saved from here on, and send the previous page."""
        if not self._is_watching:
            return
        self._give_up()
        before, self.page = self.page, Page(unit, next(self._numbers))
        self._pages.append(self.page)
        if before is not None:
            self._send(before, self.page)

    def end(self) -> None:
        """End a forward that has completed or failed."""
        if self._is_watching:
            self._is_watching = False
            self._hooks.__exit__()
        self._give_up()

    def _send(self, page: Page, following: Page) -> None:
        """Copy the storages held only by this page to the host, and pass the others on to the next page."""
        if not page.unit.storage.offload.activations:
            return
        blocks = []
        for block in page.blocks:
            if torch_private.storage_uses(block.storage_id) > _uses_of_one_holder():
                following.add(block)
            else:
                blocks.append(block)
                self._blocks.pop(block.storage_id)  # the id may be reused for other memory
        if blocks:
            tensors = [t for block in blocks if (t := block.on_device) is not None]
            copies, copied = self._host.copies(tensors, to_host=True)
            for block, copy in zip(blocks, copies, strict=True):
                block.on_host = copy
            self._leaving = blocks, copied
            page.emit(EventKind.TO_HOST, blocks)

    def _give_up(self) -> None:
        """Free the device memory of the page that is being sent, once its copy is complete."""
        if self._leaving is not None:
            blocks, copied = self._leaving
            copied.wait()
            for block in blocks:
                block.on_device = None
            self._leaving = self._wanted = None  # later uses of that page must fetch it again

    # -- what autograd calls ------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        if self.page is None or not self._may_move(tensor):
            # Detach a tensor created by the graph; otherwise, it would form a cycle that is never freed.
            return _Saved(tensor if tensor.is_leaf else tensor.detach(), tensor._version)
        storage = tensor.untyped_storage()
        block = self._blocks.get(torch_private.storage_id(storage))
        if block is None:
            block = self._blocks[torch_private.storage_id(storage)] = _Block(storage)
            self.page.add(block)
        elif block.page is not self.page:  # backward needs the later page first
            self.page.add(block)
        counter = tensor.detach()
        counter.data = self._nothing  # shares the version counter, but holds no memory
        return _Saved(counter, tensor._version, block, StorageView.of(tensor))

    def _may_move(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.device.type != self._device.type:
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST_NBYTES or torch_private.storage_id(storage) in self._weights:
            return False
        return not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        block, view = saved.block, saved.view
        found = saved.tensor._version
        if found != saved.version:
            where = "" if block is None else f", saved in unit {block.page.unit.name!r},"
            shape = tuple(saved.tensor.shape if view is None else view.size)
            raise LifecycleError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {shape}{where} is at version {found}; expected version {saved.version} instead",
                hint=(
                    "change a copy of it; use torch.autograd.set_detect_anomaly(True) to find the operation that "
                    "saved it"
                ),
            )
        if block is None or view is None:
            return saved.tensor
        self.want(block.page)
        assert block.on_device is not None  # noqa: S101 -- its page was wanted
        return view.of_storage(block.on_device.untyped_storage())

    # -- backward -----------------------------------------------------------------------------------------------

    def want(self, page: Page) -> None:
        """Make computation wait for the page that backward needs now, and start to copy the previous page."""
        if page is self._wanted:
            return
        self._bring(page)
        if page.arriving is not None:
            page.arriving.wait()
            page.arriving = None
        self._wanted = page
        while self._pages and not any(self._pages[-1].blocks):
            self._pages.pop()  # backward has finished with this page
        before = next((p for p in reversed(self._pages) if p.number < page.number and any(p.blocks)), None)
        if self._ahead and before is not None:
            self._bring(before)

    def _bring(self, page: Page) -> None:
        blocks = [block for block in page.blocks if block.on_device is None]
        if not blocks:
            return
        tensors = [t for block in blocks if (t := block.on_host) is not None]
        copies, page.arriving = self._host.copies(tensors, to_host=False)
        for block, copy in zip(blocks, copies, strict=True):
            block.on_device, block.on_host = copy, None
        page.emit(EventKind.TO_DEVICE, blocks)


class Page:
    """The tensors saved between the beginnings of two units. The autograd graph keeps the blocks alive."""

    def __init__(self, unit: Unit, number: int) -> None:
        self.unit, self.number = unit, number
        self.arriving: Copied | None = None
        self._blocks: list[weakref.ref[_Block]] = []

    @property
    def blocks(self) -> Iterable[_Block]:
        """Yield the blocks that autograd still needs and that no later page has taken over."""
        for reference in self._blocks:
            block = reference()
            if block is not None and block.page is self:
                yield block

    def add(self, block: _Block) -> None:
        """Add a block, and remove it from the page it was in."""
        block.page = self
        self._blocks.append(weakref.ref(block))

    def emit(self, kind: EventKind, blocks: Iterable[_Block]) -> None:
        """Report a copy to the event sink."""
        self.unit.emit(kind, sum(block.nbytes for block in blocks), what="activations")


class _Block:
    """A storage with tensors saved by the graph; those tensors keep it alive."""

    __slots__ = ("__weakref__", "nbytes", "on_device", "on_host", "page", "storage_id")

    page: Page

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage_id, self.nbytes = torch_private.storage_id(storage), storage.nbytes()
        self.on_device: torch.Tensor | None = bytes_of(storage)
        self.on_host: torch.Tensor | None = None


@dataclass(slots=True)
class _Saved:
    """The object that the graph holds in place of a saved tensor.

    Attributes:
        tensor: the tensor if it stays on the device; otherwise an empty tensor that shares its version counter.
        version: value of that counter when the tensor was saved.
        block, view: location of the data, or None if the tensor stays on the device.
    """

    tensor: torch.Tensor
    version: int
    block: _Block | None = None
    view: StorageView | None = None


@functools.cache
def _uses_of_one_holder() -> int:
    """Return torch's use count of a storage held only by one block; it differs between torch releases."""
    tensor = torch.empty(1)
    block = _Block(tensor.untyped_storage())
    del tensor
    return torch_private.storage_uses(block.storage_id)


class ActivationOffload(Extension):
    """Move the pages of one model if its activations are on the host."""

    def __init__(self, model: Schedule) -> None:
        super().__init__(model)
        self._pages: Pages | None = None
        self._page_of: weakref.WeakKeyDictionary[Call, Page] = weakref.WeakKeyDictionary()
        self._is_checked = False

    def materialized(self) -> None:
        """Create the pages if any unit has its activations on the host."""
        self._pages = Pages.of(self.model.units)

    def forward_begins(self) -> None:
        """Prepare to write pages."""
        if self._pages is None:
            return
        if not self._is_checked:
            check_offloads_activations(len(self.model.units))
            self._is_checked = True
        self._pages.begin(ahead=self.model.backward_prefetch is BackwardPrefetch.BACKWARD_PRE)

    def call_begins(self, unit: Unit) -> None:
        """Start a page before the unit saves any tensors."""
        if self._pages is not None:
            self._pages.turn(unit)

    def call_ends(self, unit: Unit, call: Call) -> None:
        """Remember which page backward needs when it reaches the outputs of this forward."""
        if self._pages is not None and self._pages.page is not None:
            self._page_of[call] = self._pages.page

    def call_backward_begins(self, unit: Unit, call: Call) -> None:
        """Wait for the page, and start to copy the previous one back."""
        if self._pages is not None and (page := self._page_of.get(call)) is not None:
            self._pages.want(page)

    def forward_ends(self, *, failed: bool) -> None:
        """Stop writing pages."""
        if self._pages is not None:
            self._pages.end()

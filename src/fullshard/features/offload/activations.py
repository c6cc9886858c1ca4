"""The moments at which pages of saved tensors leave for the host and come back."""

from __future__ import annotations

import weakref

from fullshard.core.schedule import BackwardPrefetch
from fullshard.engine.call import Call
from fullshard.engine.extension import Extension
from fullshard.engine.schedule import Schedule
from fullshard.engine.unit import Unit
from fullshard.features.offload.pages import Page, Pages
from fullshard.features.offload.storage import check_offloads_activations


class ActivationOffload(Extension):
    """Move the pages of one model, if it has its activations on the host."""

    def __init__(self, model: Schedule) -> None:
        super().__init__(model)
        self._pages: Pages | None = None
        self._page_of: weakref.WeakKeyDictionary[Call, Page] = weakref.WeakKeyDictionary()
        self._is_checked = False

    def materialized(self) -> None:
        """Find out whether any unit has its activations on the host."""
        self._pages = Pages.of(self.model.units)

    def forward_begins(self) -> None:
        """Begin with the first page."""
        if self._pages is None:
            return
        if not self._is_checked:
            check_offloads_activations(len(self.model.units))
            self._is_checked = True
        self._pages.begin(ahead=self.model.backward_prefetch is BackwardPrefetch.BACKWARD_PRE)

    def call_begins(self, unit: Unit) -> None:
        """Begin a page before the unit saves anything."""
        if self._pages is not None:
            self._pages.turn(unit)

    def call_ends(self, unit: Unit, call: Call) -> None:
        """Remember which page backward needs when it comes to the outputs of this forward."""
        if self._pages is not None and self._pages.page is not None:
            self._page_of[call] = self._pages.page

    def call_backward_begins(self, unit: Unit, call: Call) -> None:
        """Wait for the page, and bring the one before it."""
        if self._pages is not None and (page := self._page_of.get(call)) is not None:
            self._pages.want(page)

    def forward_ends(self, *, failed: bool) -> None:
        """Begin no more pages."""
        if self._pages is not None:
            self._pages.end()

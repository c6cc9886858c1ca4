"""Detection of ranks that hang, or that do something different from the other ranks."""

from fullshard.comm.waiting import PROGRESS
from fullshard.features.watchdog.data_order import ORDERS, check_orders
from fullshard.features.watchdog.desync import DesyncDetection
from fullshard.features.watchdog.watchdog import WATCHDOG

__all__ = ["ORDERS", "WATCHDOG", "DesyncDetection", "check_orders"]

PROGRESS.watcher = WATCHDOG

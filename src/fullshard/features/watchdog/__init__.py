"""Detection of ranks that hang, or that do not do the same as the others."""

from fullshard.features.watchdog.data_order import ORDERS, check_orders
from fullshard.features.watchdog.desync import DesyncDetection

__all__ = ["ORDERS", "DesyncDetection", "check_orders"]

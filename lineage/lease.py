"""The lock by its former names, until the subsystems that use them are rebuilt."""

from lineage.holder import EXPIRY_SECONDS, HEARTBEAT_SECONDS, SKEW_SECONDS, Holder
from lineage.lock import LOCK, acquire_or, require_owned
from lineage.lock import Lock as Lease
from lineage.lock import owner as living_holder

__all__ = [
    "EXPIRY_SECONDS", "HEARTBEAT_SECONDS", "LOCK", "SKEW_SECONDS", "Holder", "Lease", "acquire_or", "living_holder",
    "require_owned",
]  # fmt: skip

"""Numbers as people read them."""


def clock(seconds: float) -> str:
    """``0:21``, ``12:05``, ``3:04:05``"""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def counted(number: int, what: str) -> str:
    """``1 CPU``, ``2 CPUs``"""
    return f"{number} {what}{'' if number == 1 else 's'}"

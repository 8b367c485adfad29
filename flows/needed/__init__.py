"""What of a store is needed, and by whom."""

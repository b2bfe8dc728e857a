"""Search for the fastest layout that fits; explain why there is none."""

"""The search for the fastest layout that fits, and explanations where there is none."""

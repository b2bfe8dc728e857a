"""How far the estimates of published runs were off, and the intervals and the memory margin that follow from that."""

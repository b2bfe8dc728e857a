"""Step time: operations, collectives, gradient reduction and the optimizer update."""

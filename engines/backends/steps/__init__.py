"""How hand-written kernels run each kind of step of a program."""

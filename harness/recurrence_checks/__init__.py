"""The checks of a transition under a scan: of M_t itself, of the forms that run it, of what must not matter."""

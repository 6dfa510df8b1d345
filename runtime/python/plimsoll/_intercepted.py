"""What intercepts operators has a dispatch key that libtorch keeps for others, and that nobody else here uses (`interceptor.h`)."""

import torch

KEY = "Fake"


def is_under_way():
    """Whether operators of this thread are intercepted, as within an iteration."""
    return torch._C._dispatch_tls_is_dispatch_key_included(KEY)

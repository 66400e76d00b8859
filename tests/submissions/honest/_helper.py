"""A module that `helped.py` imports; not a submission."""


def shifted(x):
    wide = x.float()
    return wide - wide.amax(-1, keepdim=True).detach() if x.numel() else wide

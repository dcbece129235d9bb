"""Programs that go wrong in every way that a user's can, each in a process of its own, with either loader.

`make chaos` runs them, `make soak` the long ones. A case uses the public interface only: torch's loader
runs it unchanged. Options that torch does not have are left out there.
"""

"""Functions that make a batch of samples, to be composed and passed as ``collate_fn`` to any loader.

``Group(Pad(), Stack())`` pads the first field of the samples and stacks the second. All can be pickled.
"""

from ringloader._data.batchify_fields import Dict, Group
from ringloader._data.batchify_lists import Append, AsList, Stack
from ringloader._data.batchify_pad import Pad

__all__ = ["Append", "AsList", "Dict", "Group", "Pad", "Stack"]

for _public in (Append, AsList, Dict, Group, Pad, Stack):
    # The name that users' pickles have for it.
    _public.__module__ = __name__

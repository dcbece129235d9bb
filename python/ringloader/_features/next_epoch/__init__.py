"""``prefetch_epochs=``: the next epoch begins before ``iter``."""

"""``on_error=``: samples that raise."""

"""From a table-layout spec to kernel source and binaries. Never imports torch."""

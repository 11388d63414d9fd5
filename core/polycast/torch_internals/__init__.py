"""The private parts of torch: names that polycast reads, and changes that it makes until ``uninstall()``."""

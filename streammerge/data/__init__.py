"""Tables that ship with the package, and the scripts that make them."""

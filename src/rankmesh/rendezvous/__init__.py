"""How ranks agree: waiting for the keys of a store, no longer than was said."""

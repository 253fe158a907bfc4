"""One slice, in a process of its own: ``request.json`` in, ``outcome.json`` out; started by name, never imported."""

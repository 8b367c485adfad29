"""Planning: pins sources, fingerprints stages, looks them up in the store. Imports no heavy library."""

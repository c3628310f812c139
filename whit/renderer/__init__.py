"""Linear programs to source text, one file per language. Renderers only spell: codegen has decided."""

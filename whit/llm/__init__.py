"""Language models: GGUF in, text out. Tokenizers, chat templates, models, sampling, the engine that serves
many requests at once, and the server on top of it. `import whit` loads none of this."""

"""The HTTP interface as plain functions: bodies are checked, prompts made, answers shaped. Nothing here knows
of sockets; `whit.llm.server` puts these functions behind URLs."""

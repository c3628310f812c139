"""The HTTP interface as plain functions: bodies are checked, prompts are made, answers are shaped. Nothing here
knows of sockets; `whit.llm.server` puts these functions behind URLs."""

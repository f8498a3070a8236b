"""The HTTP server: OpenAI's completions and chat completions over `AsyncLLM`."""

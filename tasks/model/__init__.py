"""Models as files: fetched, compared, merged, with their tokenizers and chat templates."""

"""Is this machine fit to run: facts are gathered once, each check reads them and says what to do."""

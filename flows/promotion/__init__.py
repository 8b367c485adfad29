"""Who becomes the champion: standing verdicts, approval by a person, retraining, and who hears of it."""

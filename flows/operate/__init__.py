"""Operations beside a run: doctor, rehearsal, certification, blame, cancel, GC roots."""

"""Many runs of one pipeline that differ in a few fields: what they share is made once."""

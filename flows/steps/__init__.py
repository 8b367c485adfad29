"""``posttrain steps``: sessions whose steps other programs call, over REST, MCP and a Python SDK."""

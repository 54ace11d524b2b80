"""What `integrations.transformers` gives to modelling code: functions, layers, and the documents of packed rows."""

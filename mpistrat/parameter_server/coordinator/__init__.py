"""The coordinator of a ParameterServerStrategy: functions that any worker executes, in any order."""

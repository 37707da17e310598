"""The vision encoders of the supported families, each described once against `edgellm.engines.model.operations`."""

"""Names of earlier versions of tf.distribute."""

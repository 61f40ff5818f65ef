import numpy as np
import tensorflow as tf

BATCH = 64  # of all replicas together


def main():
    devices = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(devices[0], two)
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    rng = np.random.default_rng(0)
    x = rng.standard_normal((512, 20), dtype=np.float32)
    y = np.sin(x.sum(1, keepdims=True))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    dataset = strategy.experimental_distribute_dataset(dataset)

    with strategy.scope():
        linear = tf.keras.layers.Dense(1, kernel_initializer="zeros")
        model = tf.keras.Sequential([tf.keras.Input((20,)), linear])
        optimizer = tf.keras.optimizers.SGD(0.05)
        optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            losses = (model(x) - y) ** 2
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply(gradients, variables)
        return loss

    @tf.function
    def train_step(batch):
        per_replica = strategy.run(step, args=batch)
        return strategy.reduce("SUM", per_replica, axis=None)

    for epoch in range(3):
        total = 0.0
        for batch in dataset:
            total += train_step(batch)
        mean = total * BATCH / len(x)
        print(f"epoch {epoch}: loss {mean:.4f}")


if __name__ == "__main__":
    main()

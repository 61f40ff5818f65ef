"""REINFORCE: a policy learns to walk to the right end of a corridor."""

import torch
from torch import nn
from torch.nn.functional import one_hot

GAMES, MOVES, PLACES = 12, 10, 5


def play(policy, seed):
    """Play one game. Return its reward, and its moves' log probability."""
    random = torch.Generator().manual_seed(seed)
    place, reward, log_probability = PLACES // 2, 0, torch.zeros(())
    for _ in range(MOVES):
        state = one_hot(torch.tensor(place), PLACES).float()
        moves = policy(state).log_softmax(0)
        move = int(torch.multinomial(moves.exp(), 1, generator=random))
        place = min(max(place + 2 * move - 1, 0), PLACES - 1)
        reward += place == PLACES - 1
        log_probability = log_probability + moves[move]
    return reward, log_probability


def main():
    torch.manual_seed(0)
    policy = nn.Linear(PLACES, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.06)
    for update in range(15):
        loss = rewards = 0
        for game in torch.arange(GAMES):
            reward, log_probability = play(policy, update * GAMES + int(game))
            loss = loss - (reward - MOVES / 2) * log_probability / GAMES
            rewards += reward
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 5 == 4:
            loss = loss.item()
            print(f"loss {loss:.4f}, reward {rewards / GAMES:.2f}")


if __name__ == "__main__":
    main()

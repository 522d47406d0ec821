"""Pool map of a target, and the epochs at which its chains changed. Owned by `store/server/service`."""

from __future__ import annotations

from nvpool.poolmap.model import PoolMap


class MapState:
    """Newest pool map that the target knows."""

    def __init__(self) -> None:
        self.pool_map: PoolMap | None = None
        self.epoch = 0
        self.changed_at: dict[int, int] = {}
        """Chain -> epoch of its last change."""
        self.stale_below = 0
        """Epoch of the first map: changes before it are not known."""

    def use(self, pool_map: PoolMap) -> None:
        """Use a newer map."""
        before, self.pool_map, self.epoch = self.pool_map, pool_map, pool_map.epoch
        if before is None:
            self.stale_below = pool_map.epoch
            return
        for table in pool_map.tables:
            old = before.table_by_id.get(table.id)
            for number, chain in enumerate(table.chains):
                if old is None or old.chains[number] != chain:
                    self.changed_at[number] = pool_map.epoch

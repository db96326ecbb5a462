package commit

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
)

// directory is one checkpoint directory.
type directory struct {
	storage storage
	steps   catalog
	stages  staging
}

func (t Store) at(dir string) (directory, error) {
	root, err := t.FS.Resolve(dir)
	st := storage{t.FS, layout{root}}
	return directory{st, catalog{st, t.Cache}, staging{st}}, err
}

// untracked reports a missing tracker. Every commit writes it after the manifest and before it removes its intent. So
// it may be missing while there is an intent, which can be the first one.
func (d directory) untracked(ms []Manifest) ([]Skipped, error) {
	if len(ms) == 0 {
		return nil, nil
	}
	intents, _, err := d.stages.intents()
	if err != nil || len(intents) > 0 {
		return nil, err
	}
	if _, err := d.steps.tracker(); !errors.Is(err, fs.ErrNotExist) { // the first commit has just ended
		return nil, nil
	}
	return []Skipped{{NoStep, "it is missing, though steps are committed; a load takes the newest commit"}}, nil
}

func (d directory) verify(ctx context.Context, m Manifest, shards []int) error {
	finals, _, err := d.storage.realFiles(m.Files, m.ID)
	if err != nil {
		return err
	}
	if err := d.storage.expect(finals, m.Files); err != nil {
		return err
	}
	for i, f := range m.Files {
		if shards != nil && !slices.Contains(shards, f.Shard) {
			continue
		}
		crc, _, err := d.storage.fs.Checksum(ctx, finals[i])
		if err != nil {
			return err
		}
		if crc != f.CRC {
			return fmt.Errorf("%s is damaged: its checksum is %08x instead of %08x", finals[i], crc, f.CRC)
		}
	}
	return ctx.Err()
}

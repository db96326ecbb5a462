package marks

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/app/nodehealth"
	"dlrover-run/internal/openfile"
	"dlrover-run/rendezvous/lead"
)

// Names in a data directory of programs before the journal.
const (
	oldFile  = "nodes.json"
	oldLock  = "nodes.lock"
	imported = ".imported"
)

// Import puts what an older program has kept in a directory into a store, in place of what that knows of nodes, and
// gives the file another name.
func Import(ctx context.Context, dir string, store lead.Decisions, term lead.Term, log *slog.Logger) error {
	if err := oldProgram(dir); err != nil {
		return err
	}
	path := filepath.Join(dir, oldFile)
	data, err := openfile.Read(path, nodehealth.MaxSnapshot)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	var registry *nodehealth.Registry
	if err == nil {
		registry, err = nodehealth.Restore(nodehealth.Config{}, data)
	}
	if err != nil {
		return fmt.Errorf("%s: %w; nothing was changed: move the file away to begin anew, or put a good one there", path, err)
	}
	r := &records{store: store, term: term}
	_, err = r.load(ctx, nodehealth.Config{})
	var write func() error
	if err == nil {
		write, err = r.take(registry)
	}
	if err == nil {
		err = write()
	}
	if err == nil { // a crash before this leads to the same again
		err = os.Rename(path, path+imported)
	}
	if err == nil { // or an old name could come back later, in place of newer findings
		err = syncNames(dir)
	}
	if err != nil {
		return fmt.Errorf("take over %s: %w", path, err)
	}
	log.Info("what an older program knew of nodes was taken over", "file", path, "kept_as", path+imported)
	return nil
}

func syncNames(dir string) error {
	d, err := os.OpenFile(dir, unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// oldProgram returns an error while an older program uses the directory.
func oldProgram(dir string) error {
	f, err := openfile.Open(filepath.Join(dir, oldLock), os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		err = errors.New("another dlrover-master, of an older version, uses it; end that one first")
	}
	return err
}

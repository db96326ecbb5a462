package remote

import (
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"

	"dlrover-run/internal/openfile"
)

// Program is this program's own file.
type Program struct {
	Path string // where it was started from; "": unknown
	Size int64
	ID   string // unique to the file
	file *os.File
}

const ownFile = "/proc/self/exe"

// OpenProgram opens it.
func OpenProgram() (*Program, error) {
	f, err := openfile.OpenLinked(ownFile)
	if err != nil {
		return nil, err
	}
	sum := sha256.New()
	p := &Program{file: f}
	if p.Size, err = io.Copy(sum, f); err != nil {
		_ = f.Close()
		return nil, err
	}
	p.ID = hex.EncodeToString(sum.Sum(nil)[:16])
	p.Path, _ = os.Executable()
	return p, nil
}

// send may be called by several at once.
func (p *Program) send(w io.Writer) error {
	_, err := io.Copy(w, io.NewSectionReader(p.file, 0, p.Size))
	return err
}

// Close closes the file.
func (p *Program) Close() { _ = p.file.Close() }

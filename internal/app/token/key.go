package token

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"
)

// Bounds of a private key of ssh in its file, in bytes.
const (
	minKey = 128
	maxKey = 64 << 10
)

// OfKey derives a token from the first private ssh key in home. All nodes of a job share it where they can reach
// each other over ssh. Each purpose, such as a job's name, has its own token. The token reveals neither the key nor
// the token of another purpose. It returns "" without a key that ssh itself would take; file is the key's.
func OfKey(root fs.FS, home, what string) (token, file string) {
	if !path.IsAbs(home) {
		return "", "" // anyone could put a key into the working directory
	}
	for _, name := range []string{"id_ed25519", "id_ecdsa", "id_rsa"} {
		file = path.Join(home, ".ssh", name)
		if key := readKey(root, strings.TrimPrefix(file, "/")); key != nil {
			mac := hmac.New(sha256.New, key)
			mac.Write([]byte("dlrover-run job token of " + what))
			return hex.EncodeToString(mac.Sum(nil)), file
		}
	}
	return "", ""
}

// readKey returns nil where there is no secret. A mounted file usually belongs to another user.
func readKey(root fs.FS, name string) []byte {
	info, err := fs.Stat(root, name)
	if err != nil || !info.Mode().IsRegular() {
		return nil
	}
	stat, known := info.Sys().(*syscall.Stat_t)
	if own := !known || int(stat.Uid) == os.Getuid(); own && info.Mode().Perm()&0o077 != 0 {
		return nil // ssh refuses it, too
	}
	f, err := root.Open(name)
	if err != nil {
		return nil
	}
	defer f.Close()
	key, err := io.ReadAll(io.LimitReader(f, maxKey+1))
	if err != nil || len(key) < minKey || len(key) > maxKey {
		return nil
	}
	return key
}
